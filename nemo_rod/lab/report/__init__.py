"""The report of a run or of a job: tables, figures and one self-contained HTML page."""

from __future__ import annotations

from nemo_rod.lab.report.build_report import build_report
from nemo_rod.lab.report.job_folder import build_job_report
from nemo_rod.lab.report.under_way import has_begun

__all__ = ["build_job_report", "build_report", "has_begun"]
