"""Machines rented from EC2: chosen by price, acquired together, watched, and released. All of boto3 is here.

clients         calls of AWS, retried as their errors allow
errors          what AWS refuses, in words
offer           what can be rented: a machine's type in a zone, with what it has and costs
market          what can be rented for a request, compared with quotas and the price limit
selection       which types serve a request, and in what order; pure
catalogue       what a region has: types of machines, and zones where each is offered
instance_types  types of machines, read from what EC2 says
prices          what machines cost per hour, on demand and spot
estimates       a built-in list of common types and prices, with its date
quotas          vCPU quotas, and what of them is in use
listing         offers as people read them: text, HTML, and the words of a plan
configured      whether somebody has set up AWS here
cache           answers of AWS on disk, each with its date
refusals        questions that need no answer
"""
