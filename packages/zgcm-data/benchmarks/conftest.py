"""Peers are compared only where they are installed; the bench session installs them."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("datatrove") else ["test_prepare_peers.py"]
