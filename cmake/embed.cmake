# cmake -DIN=file -DNAME=name -DOUT=file -P embed.cmake: writes a C source with the text of a file as an array
# of characters. A string literal of that length is longer than C allows.
file(READ "${IN}" text HEX)
string(REGEX REPLACE "(................................................)" "\\1\n" text "${text}")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1, " text "${text}")
get_filename_component(from "${IN}" NAME)
file(WRITE "${OUT}" "/* The text of ${from}. */\nextern const char ${NAME}[];\nconst char ${NAME}[] = {\n${text}0};\n")
