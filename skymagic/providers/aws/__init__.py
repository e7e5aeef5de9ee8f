"""Machines rented from EC2: chosen by price, acquired together, watched, and released. All of boto3 is here.

clients   calls of AWS, retried as their errors allow
errors    what AWS refuses, in words
offer     what can be rented: a machine's type in a zone, with what it has and costs
"""
