"""All tasks from the papers, by name."""

from difflib import get_close_matches

from bertsmith.core.errors import UserError
from bertsmith.tasks import choice_tasks, conll, glue_tasks, squad
from bertsmith.tasks.task import Task

OWN = "custom"
"""Name of the task of a user's own table; `tasks.custom` makes it."""
TASKS: tuple[Task, ...] = (*glue_tasks.TASKS, *squad.TASKS, *conll.TASKS, *choice_tasks.TASKS)


def task_named(name: str) -> Task:
    """Return the task with this name, or with this title in a table; case is ignored."""
    known = {task.title.lower(): task for task in TASKS} | {task.name: task for task in TASKS}
    task = known.get(name.lower())
    if name.lower() == OWN:
        remedy = (
            f"bertsmith finetune {OWN} --data my.csv --text review --label stars names its columns; "
            f"its settings: bertsmith recipe show {OWN}"
        )
        raise UserError(f"{OWN} is your own table, so it lacks published files", remedy=remedy)
    if task is None:
        spellings = {spelling: task.name for spelling, task in known.items()} | {OWN: OWN}
        close = get_close_matches(name.lower(), spellings, n=1)
        meant = f"did you mean {spellings[close[0]]}? " if close else ""
        names = ", ".join(task.name for task in TASKS)
        remedy = f"{meant}the tasks are {names} and, for your own table, {OWN}"
        raise UserError(f"unknown task {name!r}", remedy=remedy)
    return task
