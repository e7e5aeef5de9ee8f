"""Machines rented from EC2: chosen by price, acquired together, watched, and released. All of boto3 is here.

clients         calls of AWS, retried as their errors allow
errors          what AWS refuses, in words
offer           what can be rented: a machine's type in a zone, with what it has and costs
market          what can be rented for a request, compared with quotas and the price limit
selection       which types serve a request, and in what order; pure
regions         names of regions: known, used, misspelt
catalogue       what a region has: types of machines, and zones where each is offered
instance_types  types of machines, read from what EC2 says
prices          what machines cost per hour, on demand and spot
estimates       a built-in list of common types and prices, with its date
scores          how likely EC2 has spot machines in a zone: orders offers
quotas          vCPU quotas, and what of them is in use
listing         offers as people read them: text, HTML, and the words of a plan
configured      whether somebody has set up AWS here
cache           answers of AWS on disk, each with its date
refusals        questions that need no answer
provider        plan, acquire, release: the machines of a pool, used as hosts of SSH are
survey          what planning has found for a pool, and acquiring has made of it
access          what leads another notebook to machines that run
lease           the machines of one pool, and all that was made for them
reservations    capacity that the account has reserved, put first
placement       machines near each other in the network
permission      EC2's own dry run of a start
nvme            their own disks, for environments and values
preflight       machines checked before the first cell
replacing       machines in the place of broken ones, once, and of lost ones, when capacity returns
ledger          what was rented and what it cost, kept over restarts
launch          all machines at once, in one zone and of one type
images          which image they boot
network         their subnet and security group
keys            a pool's SSH keys: the user's, and the hosts' own
userdata        what they are told at their first boot
watchdog        ends a machine that nobody uses, without AWS and without us
way             to machines without public addresses: a jump host, or AWS Systems Manager
stopping        machines stopped with their disks, and started again
machine         from machines that run to connections
sweep           what was rented, found by its tags alone and given back
tagged          the pools that it was rented for, listed by their tags
tags            the tags of all that is rented
"""
