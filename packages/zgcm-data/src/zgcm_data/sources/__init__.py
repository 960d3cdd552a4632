"""Where documents come from: this Python installation, or files that the user names."""

from zgcm_data.sources.files import ReadReport, read_records
from zgcm_data.sources.installation import collect_default_corpus

__all__ = ["ReadReport", "collect_default_corpus", "read_records"]
