"""Machines rented from EC2: chosen by price, acquired together, watched, and released. All of boto3 is here.

clients    calls of AWS, retried as their errors allow; whether AWS is set up here
errors     what AWS refuses, in words
cache      answers that are kept on disk with their date, and questions that need no answer
catalogue  what a region has: types of machines and their zones; a built-in list of common types
prices     what machines cost per hour, on demand and spot
selection  what can be rented, which of it serves a request, and in what order
market     what can be rented for a request, compared with the price limit
listing    offers as people read them: text, HTML, and the words of a plan
provider   plan, acquire, release: the machines of a pool, used as hosts of SSH are
rented     what planning and acquiring have made of a pool, and what leads another notebook to its machines
lease      the machines of one pool, and all that was made for them
launch     all machines at once, in one zone and of one type; stopped with their disks, and started again
network    their subnet, security group and placement group
boot       what they are told at their first boot: keys, user data, the watchdog that ends them
reaching   from machines that run to connections: directly, or through a jump host
replacing  machines checked before the first cell; others in the place of broken and of lost ones
sweep      what was rented, found by its tags alone: listed by pool, and given back
tags       the tags of all that is rented
ledger     what was rented and what it cost, kept over restarts
"""
