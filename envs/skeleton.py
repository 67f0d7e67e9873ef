"""The skeleton of a new environment, complete and small: what `python -m envs new` writes."""

from __future__ import annotations

import keyword
import re
import sys
from pathlib import Path

from envs.errors import UserError

TEMPLATE = '''"""{name}: say here what an episode is."""

import envs


class {name}(envs.MemoryEnv):
    """Three drawers, and a question about what is in one of them."""

    tools = (envs.Tool("open", "opens a drawer", {{"number": "1, 2 or 3"}}),)

    def draw_task(self, rng, options):
        """The next episode's task, decided by rng, or by options["index"]."""
        index = int(options.get("index", rng.integers(1000)))
        self.drawers = [("gold", "silver", "copper")[(index + place) % 3] for place in range(3)]
        asked = index // 3 % 3
        return envs.Task(
            id=f"{slug}/{{index}}",
            questions=(f"What is in drawer {{asked + 1}}?",),
            golds=((self.drawers[asked],),),
        )

    def execute(self, call):
        """Carry out one call of a tool and say what happens, as plain text."""
        number = call.arguments["number"].strip()
        if number not in ("1", "2", "3"):
            raise envs.InvalidAction("there are drawers 1, 2 and 3")
        return f"In drawer {{number}} there is {{self.drawers[int(number) - 1]}}."

    def score(self, answer, task):
        """Scores of the final answer; "reward" is what training maximises."""
        return {{"reward": float(answer.strip().lower() == task.golds[0][0])}}


envs.register("{namespace}/{name}-v0", "{module}:{name}")
'''


def write_skeleton(name: str, folder: Path, namespace: str = "my") -> tuple[Path, str]:
    """Write ``name`` (CamelCase) as a module in ``folder``.

    Returns:
        The file and the id under which it can be checked: ``module:namespace/Name-v0``.

    Raises:
        UserError: no usable name, or the file is there already.
    """
    if not re.fullmatch(r"[A-Z][A-Za-z0-9]*", name) or keyword.iskeyword(name):
        raise UserError(f"{name!r} is no class name: letters and digits, the first a capital, as in MyMaze")
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    # Written into the working directory it would stand in front of the module of that name.
    if module in sys.stdlib_module_names or module == __name__.partition(".")[0]:
        raise UserError(
            f"{name!r} would be the module {module}, which is there already; another name is needed"
        )
    path = folder / f"{module}.py"
    if path.exists():
        raise UserError(f"{path} is there already; it is left as it is")
    if not folder.is_dir():
        raise UserError(f"folder {folder} does not exist")
    text = TEMPLATE.format(name=name, slug=module.replace("_", "-"), namespace=namespace, module=module)
    path.write_text(text, encoding="utf-8")
    return path, f"{module}:{namespace}/{name}-v0"
