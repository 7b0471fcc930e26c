# SPDX-License-Identifier: Apache-2.0
"""`check_reward` and `check_text_reward`: the contract as a function for users.

It needs `base`; no judge imports it.
"""
