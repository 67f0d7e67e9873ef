"""Text environments for agents that manage their own memory; importing this package registers their ids."""

from __future__ import annotations

from envs.base import InvalidAction, MemoryEnv, Tool, render_observation
from envs.errors import UserError
from envs.grammar import ToolCall, parse_turn
from envs.registry import find_plugins, list_ids, load_plugins, make, register
from envs.tasks import Task, load_tasks

__all__ = [
    "InvalidAction",
    "MemoryEnv",
    "Task",
    "Tool",
    "ToolCall",
    "UserError",
    "list_ids",
    "load_plugins",
    "load_tasks",
    "make",
    "parse_turn",
    "register",
    "render_observation",
]

register("mempo/SearchQA-v0", "envs.search_qa:SearchQA")
register("mempo/MultiObjectiveQA-v0", "envs.multi_objective:MultiObjectiveQA")
register("mempo/DocumentStream-v0", "envs.document_stream:DocumentStream")
register("mempo/Errands-v0", "envs.errands:Errands")
find_plugins()
