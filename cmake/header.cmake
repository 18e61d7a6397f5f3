# cmake -P: writes OUT, the public header IN in the form for users: "<module>/<name>.h" becomes
# <tandem/<name>.h>. Only the folder name `tandem` belongs to this project: a user's program may have its own
# base/ or device/.
cmake_minimum_required(VERSION 3.24)

file(READ "${IN}" text)
string(REGEX REPLACE "#include \"[^\"\n]*/([^\"/\n]*)\"" "#include <tandem/\\1>" text "${text}")
file(WRITE "${OUT}" "${text}")
