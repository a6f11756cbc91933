"""Named pipeline schedules: compute orders by construction, their registry, and orders that users give as CSV.

Imports problem; decides no transfers and knows no search.
"""
