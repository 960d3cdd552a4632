"""The report: one page, nothing from elsewhere, every figure from the records."""

import html.parser
import re
from pathlib import Path

import pytest

from zgcm_testing.tiny_runs import tiny_recipe
from zgcm_train import run_recipe, write_report
from zgcm_train.errors import PathError
from zgcm_train.report.records import read_records


@pytest.fixture(scope="module")
def run(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_recipe(tiny_recipe(data, run={"name": "a <b> & c"}), folder)
    write_report(folder)
    return folder


class Addresses(html.parser.HTMLParser):
    """Collects every address that a browser would fetch, and the text."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.tags: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href", "srcset")]


def test_the_page_needs_no_network(run: Path) -> None:
    page = (run / "report.html").read_text()
    parsed = Addresses(page)
    assert len(parsed.addresses) == 2 * 7
    assert all(address.startswith("data:image/svg+xml;base64,") for address in parsed.addresses)
    assert not {"script", "link", "iframe"} & set(parsed.tags)
    assert "url(" not in page


def test_names_are_escaped(run: Path) -> None:
    page = (run / "report.html").read_text()
    assert "a &lt;b&gt; &amp; c" in page
    assert "<b>" not in page


def test_figures_come_from_the_records(run: Path) -> None:
    page, records = (run / "report.html").read_text(), read_records(run)
    for domain, figures in records.evaluations[-1]["domains"].items():
        assert re.search(rf"<td>{domain}</td>.*?{figures['bits_per_byte']:.3f}", page)
    assert f"{96 * 32:,}" in page
    assert "first to second" in page
    assert "precision 5, scaling" in page
    assert "warmup_updates = 2" in page
    assert "not measured" in page  # this run has no unigram baseline, and says so


def test_shares_of_a_stage_sum_to_one(run: Path) -> None:
    for stage in ("first", "second"):
        rows = [r for r in read_records(run).sources if r["stage"] == stage]
        assert sum(r["observed_share"] for r in rows) == pytest.approx(1.0)
        assert sum(r["tokens"] for r in rows) == 48 * 32


def test_the_page_is_the_same_when_written_again(run: Path) -> None:
    first = (run / "report.html").read_bytes()
    write_report(run)
    assert (run / "report.html").read_bytes() == first


def test_a_folder_without_training_is_refused(data: Path, tmp_path: Path) -> None:
    from zgcm_train.run_folder import prepare_folder

    prepare_folder(tmp_path, tiny_recipe(data))
    with pytest.raises(PathError, match="no training record yet"):
        write_report(tmp_path)
