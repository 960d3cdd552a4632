"""Ready language models: one file per library, each importing it only when it is used."""
