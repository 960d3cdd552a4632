"""``python -m zgcm_train`` is the command ``zgcm-train``; torchrun starts it so."""

from zgcm_train.cli import main

main()
