"""Configurations of other frameworks, written from a Plan and read back (docs/formats.md).

formats.toml   the frameworks' keys beside a Plan's fields, and what a framework rejects; the rest follows from it
table          FormatKey and Format: a row and a table of that file
frameworks     the formats by name; what several keys say together
syntax         JSON, YAML and Python, written and read;  script  command lines and batch scripts
write          a Plan written, with the batch, machines and addresses;  read  a file read, its format guessed
"""
