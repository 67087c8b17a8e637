#!/bin/sh
# Runs pytest in two parts: what may run side by side on two workers, then what is marked `alone` (not by `make test`).
#   sh scripts/test.sh MARKS [pytest's arguments]      MARKS: an expression as for -m, such as "not soak"
set -u
marks=$1
shift
stop=
for word in "$@"; do
    case $word in -x | --exitfirst | --maxfail*) stop=1 ;; esac
done

python=.venv/bin/python
$python -m pytest -n 2 --dist worksteal -m "($marks) and not alone" "$@"
beside=$?
case $beside in
    0 | 5) ;;
    1) [ -z "$stop" ] || exit 1 ;;
    *) exit $beside ;;
esac
case $marks in *"not slow"*) exit $beside ;; esac # `make test`: CI runs what needs the machine to itself
# Without paths only modules that have such tests are collected, since importing all takes as long as they do.
case " $*" in *" "[!-]*) ;; *) set -- "$@" $(grep -rl --include="*.py" --exclude-dir=classroom "mark.alone" tests) ;; esac
$python -m pytest -m "($marks) and alone" "$@"
alone=$?

# pytest's 5: no test was selected. One part may be empty, both may not.
case $beside$alone in
    00 | 05 | 50) exit 0 ;;
    55) exit 5 ;;
    0?|5?) exit $alone ;;
    *) exit $beside ;;
esac
