# SPDX-License-Identifier: Apache-2.0
"""`visalign score`: folders and tables of images under a reward, with a log that resumes. It needs `shared`."""
