"""A rank's process, from the fork to the user's function and back.

boot                  how helper processes start
fork_server           the process that has imported torch and forks ranks
fork_server_client    the parent's end of the fork server
run_folder            the folders of launches, through which their processes communicate
store                 where ranks find each other: a file that only they share
payload               the user's function and arguments, by value
log_settings          what the launching process has set for `logging`
rank                  the rank's half of a launch
launcher_environment  what a program expects of its launcher
seal                  signatures on the objects that ranks send each other
program_exit          how a program ends on a rank
output                what a rank prints, and how it is read
stacks                where a rank is
rank_processes        the ranks' processes: ids, exits, signals, what the system reports of them
"""
