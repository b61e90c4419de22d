"""What `gredp_geodp.py` trains: the tables of both papers by name."""

from __future__ import annotations

import geodp_tasks as geodp
import gredp_tasks as gredp
from task import Method, Options, Pick, Task, noise_free, shortened

#: the papers' noise-free numbers; ours have small batches
QUIET = (
    *(noise_free(column, 0.01) for column in gredp.COLUMNS),
    noise_free(geodp.TABLE_II, 0.05, batch=512, steps=2344), noise_free(geodp.TABLE_III, 0.05, batch=512, steps=1953),
)  # fmt: skip

TASKS = {task.name: task for task in (*gredp.ALL, *geodp.ALL, *QUIET)}
DEFAULT = ("gredp-table1", "geodp-table2", "geodp-fig5")

__all__ = ["DEFAULT", "TASKS", "Method", "Options", "Pick", "Task", "shortened"]
