"""What the input does to the tables: readers of logs and the access profile they give."""

from torchrec_oper.profile.access import AccessProfile, TableAccess, Trace, merge_profiles

__all__ = ["AccessProfile", "TableAccess", "Trace", "merge_profiles"]
