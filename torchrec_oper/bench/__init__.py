"""The measurements behind the numbers that the README and the planner use."""
