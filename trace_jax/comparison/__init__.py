"""`trace-jax compare`: the same training under several methods and seeds, from one checkpoint.

1. `variants` says what is compared, `plan` turns it into the configs of the runs and refuses what cannot work.
2. `start` makes the checkpoint that every run begins from, `run` trains and evaluates, `state` is what a resumed call goes by.
3. `figures` and `collapse` reduce the runs to `comparison.json`; `table` and `page` show it.

docs/comparison.md describes the folder and the JSON.
"""
