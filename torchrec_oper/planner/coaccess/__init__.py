"""Refinement by co-access: rows that bags name together go to one owner, where that helps."""

from torchrec_oper.planner.coaccess.refine import Refined, RefinedTable, check_refinable, refine

__all__ = ["Refined", "RefinedTable", "check_refinable", "refine"]
