"""The study of docs/study.md: from the folder of its runs to small logs, and from these to its tables and figures.

python -m trace_jax.study collect RUNS   # RUNS -> docs/study/*.json
python -m trace_jax.study render         # docs/study/*.json -> docs/study.md, docs/images/study-*.png
"""
