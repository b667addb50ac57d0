"""The five task classes of the paper and which of them are sensitive to sparsity."""

from __future__ import annotations

import enum


class TaskClass(enum.IntEnum):
    """Task class of a document; the numbers are the released code's `task_ids`."""

    SINGLE_QA = 0
    MULTIHOP_QA = 1
    SUMMARIZATION = 2
    CODE = 3
    IN_CONTEXT = 4

    @property
    def sensitive(self) -> bool:
        """True for the classes that lose quality when heads are made sparse (target `t_sen`; the others `t_rob`)."""
        return self in (TaskClass.SINGLE_QA, TaskClass.MULTIHOP_QA)


NUM_TASK_CLASSES = len(TaskClass)

_NAMES: dict[str, TaskClass] = {
    "single_qa": TaskClass.SINGLE_QA,
    "multihop_qa": TaskClass.MULTIHOP_QA,
    "summarization": TaskClass.SUMMARIZATION,
    "code": TaskClass.CODE,
    "in_context": TaskClass.IN_CONTEXT,
    # Spellings of the released data.
    "single qa": TaskClass.SINGLE_QA,
    "multihop qa": TaskClass.MULTIHOP_QA,
    "in-context learning": TaskClass.IN_CONTEXT,
}


def parse_task_class(name: str | int) -> TaskClass:
    """Returns the class for a name (either spelling, any case) or the released number; ValueError names what is accepted."""
    if isinstance(name, int) and not isinstance(name, bool) and 0 <= name < NUM_TASK_CLASSES:
        return TaskClass(name)
    if isinstance(name, str) and name.strip().lower() in _NAMES:
        return _NAMES[name.strip().lower()]
    raise ValueError(f"task class {name!r}: accepted are {', '.join(repr(n) for n in _NAMES)} or 0..{NUM_TASK_CLASSES - 1}")
