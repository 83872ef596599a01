"""Model families, one folder each; `registry` finds them by name."""
