"""The steps of ``zgcm_data.build``, each run once and skipped while its inputs are unchanged."""
