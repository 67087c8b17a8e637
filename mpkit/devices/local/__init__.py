"""The devices of this machine: what there is, what the environment lets a process see, and which rank gets which."""
