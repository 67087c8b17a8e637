"""The gate (`.ci/run`) and the soak (`make soak`): what runs, in which order, and the report at the end."""
