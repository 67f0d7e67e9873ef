"""The embedded world: real facts from the CIA World Factbook as a corpus and one- and multi-hop questions."""

from envs.tasks.factbook.world import World, build_world

__all__ = ["World", "build_world"]
