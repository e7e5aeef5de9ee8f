"""EC2 provider: machines chosen by price, acquired together, monitored and released.

All use of boto3 is in this folder.

clients    calls to AWS, with retries per kind of error; detects if AWS is set up here
errors     explanations of AWS errors
cache      answers cached on disk with their date, and queries that may go unanswered
catalogue  machine types of a region and their zones; a built-in list of common types
prices     hourly prices of machines, on demand and spot
selection  which offers serve a request, and in what order
market     the offers for a request, compared with the price limit
listing    offers in readable form: text, HTML, and the summary in a plan
provider   plan, acquire, release: the machines of a pool, used like SSH hosts
rented     resources that planning and acquiring created, and access for another notebook
lease      the machines of one pool, and everything created for them
launch     start all machines at once, in one zone and of one type
network    their subnet, security group and placement group
boot       their setup at first boot: keys, user data, and the watchdog that ends them
instances  descriptions of instances, parsed from EC2's answers
reaching   connect to running machines, directly or through a jump host
replacing  check machines before the first cell; replace broken and lost ones
sweep      rented resources found by their tags alone: list them by pool, and release them
tags       the tags of everything rented
ledger     rented machines and their cost, kept over restarts
"""
