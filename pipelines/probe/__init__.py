# SPDX-License-Identifier: Apache-2.0
"""`visalign probe-reward`: irrelevant changes that shift a reward's scores.

It needs `shared`; the catalogue of changes belongs to `visalign.evaluation.probes`.
"""
