"""`%%ranks`: cells of a notebook that run on every rank of a group that stays.

magics        `%%ranks`, `%ranks`, `%ranks_get`, `%ranks_reset`, as IPython knows them
session       the group: one long launch whose function takes cells
selection     which ranks: "0,2", "1:3"
replies       what the ranks returned, or how they failed
completion    names that live on the ranks, behind the tab key
exchange      requests and answers, as files and pipes in the launch's folder
request_loop  a rank's half: wait for a request, answer it
cell          run a cell on a rank
"""
