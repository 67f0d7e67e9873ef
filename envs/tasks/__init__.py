"""Where questions come from: a `Task` and the sources that make them."""

from envs.tasks.task import Task

__all__ = ["Task"]
