"""`%%ranks`: cells of a notebook that run on every rank of a group that stays.

magics        `%%ranks` and `%ranks_reset`, as IPython knows them; the group, one long launch whose function takes cells
on_rank       a rank's half: wait for a request, run the cell, answer
"""
