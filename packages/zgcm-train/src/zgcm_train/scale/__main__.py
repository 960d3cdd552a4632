"""Measure one rank in a process of its own: a recipe comes in and a measure goes out, both as JSON."""

import json
import sys

from zgcm_train.config import Recipe
from zgcm_train.scale.rank import measure_rank

if __name__ == "__main__":
    measured = measure_rank(Recipe.model_validate_json(sys.stdin.read()), int(sys.argv[1]))
    json.dump(measured.as_dict(), sys.stdout)
