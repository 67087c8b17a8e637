"""Configurations of other frameworks, written from a Plan and read back (docs/formats.md).

formats.toml   the frameworks' keys beside a Plan's fields; what is written, read, and cannot be said follows
table          FormatKey and Format: a row and a table of that file
frameworks, launchers, torchtitan
               what several keys say together, and what a framework would refuse
catalogue      the formats by name
request        what a Plan leaves open and a file has to say: batch, machines, addresses
syntax         JSON and YAML, written and read; a value of a text, with what is open about it
script         command lines and batch scripts;  python_code  Python
write          a Plan written;  read  a file read, its format guessed
"""
