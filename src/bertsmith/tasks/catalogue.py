"""Every task of the papers, by name."""

from difflib import get_close_matches

from bertsmith.ground.errors import UserError
from bertsmith.tasks import choices, conll, glue, squad
from bertsmith.tasks.task import Task

TASKS: tuple[Task, ...] = (*glue.TASKS, *squad.TASKS, *conll.TASKS, *choices.TASKS)


def task_named(name: str) -> Task:
    """The task of this name, or of this title in a table, in any case."""
    known = {task.title.lower(): task for task in TASKS} | {task.name: task for task in TASKS}
    task = known.get(name.lower())
    if task is None:
        close = get_close_matches(name.lower(), known, n=1)
        meant = f"did you mean {known[close[0]].name}? " if close else ""
        remedy = f"{meant}the tasks are {', '.join(task.name for task in TASKS)}"
        raise UserError(f"there is no task {name!r}", remedy=remedy)
    return task
