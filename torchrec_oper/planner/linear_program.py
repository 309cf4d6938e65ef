"""Linear programs for HiGHS, put together piece by piece."""

from __future__ import annotations

import highspy
import numpy as np
import numpy.typing as npt

from torchrec_oper.planner.demand import Floats

Ints = npt.NDArray[np.int64]


class Entries:
    """The nonzeros of a matrix, gathered piece by piece."""

    def __init__(self) -> None:
        self.rows: list[Ints] = []
        self.columns: list[Ints] = []
        self.values: list[Floats] = []

    def add(self, rows: npt.ArrayLike, columns: npt.ArrayLike, values: npt.ArrayLike) -> None:
        """Add entries; the arrays are broadcast against each other."""
        r, c, v = np.broadcast_arrays(rows, columns, values)
        self.rows.append(r.ravel())
        self.columns.append(c.ravel())
        self.values.append(v.ravel())


def linear_program(
    entries: Entries, objective: Floats, lower: Floats, upper: Floats
) -> highspy.HighsLp:
    """Minimise over columns of 0 or more.

    Args:
        entries: of the matrix.
        objective: the cost of each column.
        lower, upper: limits of each row.
    """
    rows, columns = np.concatenate(entries.rows), np.concatenate(entries.columns)
    values = np.concatenate(entries.values)
    there = values != 0
    order = np.lexsort((rows[there], columns[there]))
    program = highspy.HighsLp()
    program.num_col_, program.num_row_ = len(objective), len(upper)
    program.col_cost_ = objective
    program.col_lower_ = np.zeros(len(objective))
    program.col_upper_ = np.full(len(objective), highspy.kHighsInf)
    program.row_lower_, program.row_upper_ = lower, upper
    matrix = program.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kColwise
    matrix.start_ = np.searchsorted(columns[there][order], np.arange(len(objective) + 1))
    matrix.index_, matrix.value_ = rows[there][order], values[there][order]
    return program


def solve(program: highspy.HighsLp) -> tuple[Floats, Floats] | None:
    """The values of an optimum's columns and the duals of its rows, or None without one."""
    # The class below highspy.Highs, whose constructor prints a banner.
    solver = highspy._core._Highs()
    # One thread and a fixed seed: equal programs have equal solutions.
    for option, value in (("output_flag", False), ("threads", 1), ("random_seed", 0)):
        solver.setOptionValue(option, value)
    solver.passModel(program)
    solver.run()
    if solver.getModelStatus() != highspy.HighsModelStatus.kOptimal:
        return None
    solution = solver.getSolution()
    return np.array(solution.col_value), np.array(solution.row_dual)
