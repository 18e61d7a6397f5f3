# cmake -P: writes OUT, the public header IN as others include it: "<module>/<name>.h" becomes
# <tandem/<name>.h>. Alone of all words of an include path `tandem` is ours: a caller may well have a base/ or
# a device/ of its own.
cmake_minimum_required(VERSION 3.24)

file(READ "${IN}" text)
string(REGEX REPLACE "#include \"[^\"\n]*/([^\"/\n]*)\"" "#include <tandem/\\1>" text "${text}")
file(WRITE "${OUT}" "${text}")
