import re
from pathlib import Path

README = Path(__file__).parents[1] / "README.md"


def test_the_example_runs_and_prints_what_it_says(capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    exec(compile(example, str(README), "exec"), {})
    assert capsys.readouterr().out == "8.00 bits per byte\n"
    assert "# 8.00 bits per byte" in example


def test_every_command_line_of_the_readme_is_understood():
    from zgcm_eval.cli import build_parser

    lines = re.findall(r"^zgcm-eval (.+)$", README.read_text(encoding="utf-8"), re.MULTILINE)
    assert len(lines) == 7
    for line in lines:
        assert callable(build_parser().parse_args(line.split()).run)
