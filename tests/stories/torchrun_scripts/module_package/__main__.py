import os
import sys

from . import words

print(words.TEXT, os.environ["RANK"], sys.argv[1:], __name__, os.path.basename(sys.argv[0]))
