"""Configurations of other frameworks, written from a Plan and read back (docs/formats.md).

formats.toml   the frameworks' keys beside a Plan's fields, and what a framework refuses; the rest follows from it
table          FormatKey and Format: a row and a table of that file
frameworks     the formats by name; what several keys say together
request        what a Plan leaves open and a file has to say: batch, machines, addresses
syntax         JSON and YAML, written and read
script         command lines and batch scripts;  python_code  Python
write          a Plan written;  read  a file read, its format guessed
"""
