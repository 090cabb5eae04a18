"""`bertsmith tasks`: list all tasks with their files, metrics and published settings."""

from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, echo

from bertsmith.cli import options
from bertsmith.cli.presenting import print_json

if TYPE_CHECKING:
    from bertsmith.tasks.task import Task


def tasks(
    name: Annotated[str, Argument(metavar="[TASK]", help="One of them, with all of its files.")] = "",
    as_json: options.Json = False,
) -> None:
    """List the tasks of `finetune`: kind, metrics (the first one decides), settings and files.

    Example: bertsmith tasks

    Example: bertsmith tasks mrpc
    """
    from bertsmith.tasks.catalogue import OWN, TASKS, task_named

    chosen = [task_named(name)] if name else list(TASKS)
    if as_json:
        print_json({task.name: plain(task) for task in chosen})
        return
    if name:
        show(chosen[0])
        return
    widest = max(len(task.name) for task in chosen)
    for task in chosen:
        metrics = ", ".join(each.replace("_", " ") for each in task.metrics)
        files = next(iter(next(iter(task.splits.values())).files))
        echo(f"{task.name:<{widest}}  {task.title}: {task.kind.name}; {metrics}; {files} ...")
    echo(f"{OWN:<{widest}}  your own table: classify, multilabel or regress (finetune --help)")
    echo(
        "bertsmith tasks TASK shows one with its files and settings, bertsmith recipe show TASK every setting"
    )


def show(task: "Task") -> None:
    """Print a task for people."""
    facts = plain(task)
    echo(f"{task.name}: {task.title}, a {task.kind.name} task")
    echo(f"metrics: {', '.join(facts['metrics'])}; the first one decides")
    if task.labels:
        echo(f"labels: {', '.join(task.labels)}")
    for split, names in facts["files"].items():
        echo(f"{split}: {', '.join(names)}")
    if task.folders:
        echo(f"folders: {', '.join(task.folders)}")
    settings = ", ".join(f"{key} = {value}" for key, value in task.settings.items())
    echo(f"published settings: {settings or 'the defaults'}")


def plain(task: "Task") -> dict[str, Any]:
    """Return a task in a form for JSON."""
    return {
        "title": task.title,
        "kind": task.kind.name,
        "metrics": list(task.metrics),
        "labels": list(task.labels),
        "files": {name: list(split.files) for name, split in task.splits.items()},
        "folders": list(task.folders),
        "settings": dict(task.settings),
    }
