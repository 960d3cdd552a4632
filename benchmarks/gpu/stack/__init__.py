"""Parts of ``layer_stack.py``, which says what is measured and how."""
