"""Configurations of other frameworks, written from a Plan and read back (docs/formats.md).

request    what a Plan leaves open and a file has to say: batch, machines, addresses
keys       Key and Format: a table of their keys beside our fields, from which both directions follow
syntax     JSON and YAML, written and read;  command  command lines and batch scripts;  python_code  Python
accelerate, deepspeed, fsdp, megatron, tf_config, torchrun, torchtitan, trainer
           a table per format; torchrun has slurm's too
write      a Plan written;  read  a file read, its format guessed
word       a value of a text, with what is open about it
shell, shell_text
           what is read of shell scripts, none of which runs
"""
