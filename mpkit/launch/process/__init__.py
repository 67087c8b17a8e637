"""A rank's process, from the fork to the user's function and back.

fork_server    the process that has imported torch and forks ranks; the parent's end of it; how helper processes start
run_folder     the folders of launches, through which their processes communicate
payload        the user's function and arguments, by value, and what this process has set
rank           the rank's half of a launch, and the process group: where ranks find each other, whom they trust
output         what a rank prints, and how it is read
processes      the ranks' processes: ids, exits, signals, stacks, what the system reports of them
"""
