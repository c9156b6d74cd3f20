"""A page on this machine that follows runs and federations while they go on, and compares runs that are chosen.

It reads run directories and nothing else, so that a run neither knows nor waits for it, and one that is killed is
still there to be looked at. The pictures are those of the report.
"""

from headstart.report.dashboard.federation import STATUS, status_lines, status_rows
from headstart.report.dashboard.gallery import Gallery, Status
from headstart.report.dashboard.server import LOOPBACK, Dashboard

__all__ = ["LOOPBACK", "STATUS", "Dashboard", "Gallery", "Status", "status_lines", "status_rows"]
