"""Take over what others' launchers were set to."""

from zgcm_train.interchange.envs import ImportedRecipe, KeyReport, import_env_files

__all__ = ["ImportedRecipe", "KeyReport", "import_env_files"]
