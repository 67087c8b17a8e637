"""A rank's process, from the fork to the user's function and back.

boot                  what helper processes import, and from where
fork_server           the process that has imported torch and forks ranks
fork_server_client    the parent's end of the fork server
folder                the files of a launch, through which its processes communicate
store                 where ranks find each other: a file that only they share
payload               the user's function and arguments, by value
rank                  the rank's half of a launch
context               the first argument of a function on a rank
seal                  signatures on what ranks tell each other over sockets
program_exit          how a program ends on a rank
output                what a rank prints
stacks, vitals        where a rank is, and what the system reports about its process
"""
