"""The page and the picture that show a run after it has ended, or while it goes on."""

from zgcm_train.report.page import write_report

__all__ = ["write_report"]
