"""Machines rented from EC2: chosen by price, acquired together, watched, and released. All of boto3 is here.

offer     what can be rented: a machine's type in a zone, with what it has and costs
"""
