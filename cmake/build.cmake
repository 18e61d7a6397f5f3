# cmake -P: writes OUT, the source file of td_build_info(), from TEMPLATE (impl/base/build.c.in). If nothing
# changed, OUT stays as it is. Every build runs this, because the configuration may be older than the source.
#   SOURCE    the source tree           MODULES   modules of impl/ without td_, in the order of their layers
#   CC        the C compiler; without it no libtandem.cdef is written
#   VERSION COMPILER MARCH FLAGS CUDA ARCHITECTURES BACKENDS   of the build; all but the first and the last
#   change the ids
#
# The interface is a hash of the public headers without comments and white space. libtandem.cdef has their
# declarations for Python's cffi, made by the preprocessor of CC, after the interface. It is beside OUT.
#
# The id of a module is a hash of its files, of all compile options, and of the files that its files need. A
# file needs the headers that it includes, and the files that define the functions and tables that it names.
# These files count with their needs in turn. So an edit of one operation does not make results of flash
# attention invalid. Files for CUDA (cuda.c, cuda.h, cuda/) and the kernels that they include count in a
# second id. So a change of a kernel does not make results of the CPU invalid.

cmake_minimum_required(VERSION 3.24)

# The headers of impl/ and kernels/ that a file includes.
function(includes_of file out)
  file(STRINGS "${file}" lines REGEX "^#include \"")
  set(found "")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "^#include \"([^\"]*)\".*" "\\1" path "${line}")
    list(APPEND found "${path}")
  endforeach()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

# A hash of files by their paths in the source tree and their contents, with some words in front.
function(hash_of words files out)
  list(REMOVE_ITEM files "")
  list(SORT files)
  list(REMOVE_DUPLICATES files)
  set(text "${words}")
  foreach(file IN LISTS files)
    file(SHA256 "${SOURCE}/${file}" hash)
    string(APPEND text "\n${file} ${hash}")
  endforeach()
  string(SHA256 hash "${text}")
  string(SUBSTRING "${hash}" 0 16 hash)
  set(${out} "${hash}" PARENT_SCOPE)
endfunction()

# kernels/<name>.h or .cu stands for all files kernels/<name>.* and kernels/<name>_*, for the files that these
# include, and for kernels/tile/.
function(kernel_files headers out)
  set(files "")
  set(seen "")
  while(headers)
    list(POP_FRONT headers header)
    get_filename_component(name "${header}" NAME_WE)
    if(NOT header MATCHES "^kernels/[^/]+$" OR name IN_LIST seen)
      continue()
    endif()
    list(APPEND seen ${name})
    file(GLOB family RELATIVE "${SOURCE}" "${SOURCE}/kernels/${name}.*" "${SOURCE}/kernels/${name}_*")
    list(APPEND files ${family})
    foreach(file IN LISTS family)
      includes_of("${SOURCE}/${file}" more)
      list(APPEND headers ${more})
    endforeach()
  endwhile()
  if(files)
    file(GLOB_RECURSE tiles RELATIVE "${SOURCE}" "${SOURCE}/kernels/tile/*")
    list(APPEND files ${tiles} kernels/CMakeLists.txt)
  endif()
  set(${out} "${files}" PARENT_SCOPE)
endfunction()

# The needs of a file: needs_<file> are files of impl/, kernels_<file> are files of kernels/. Names in
# public headers and in messages do not count, because neither calls the function.
function(read_needs file)
  includes_of("${SOURCE}/${file}" headers)
  list(TRANSFORM headers PREPEND "impl/")
  list(TRANSFORM headers REPLACE "^impl/kernels/" "kernels/")
  file(READ "${SOURCE}/${file}" text)
  set(names "")
  string(REGEX REPLACE "\"[^\"\n]*\"" "" text "${text}")
  if(NOT text MATCHES "TD_BEGIN_DECLS")
    string(REGEX MATCHALL "td_[a-z0-9_]+" names "${text}")
    list(REMOVE_DUPLICATES names)
  endif()
  foreach(name IN LISTS names)
    list(APPEND headers ${defined_${name}})
  endforeach()
  list(REMOVE_DUPLICATES headers)
  set(kernels ${headers})
  list(FILTER kernels INCLUDE REGEX "^kernels/")
  list(REMOVE_ITEM headers ${kernels} "")
  set(needs_${file} "${headers}" PARENT_SCOPE)
  set(kernels_${file} "${kernels}" PARENT_SCOPE)
endfunction()

# The files and all their needs. Files for CUDA count only if `cuda` is set. <out>_kernels gets the kernel
# headers.
function(closure_of files cuda out)
  set(found "")
  set(kernels "")
  while(files)
    list(POP_BACK files file)
    if(DEFINED seen_${file} OR NOT DEFINED needs_${file} OR (NOT cuda AND file MATCHES "${CUDA_FILE}"))
      continue()
    endif()
    set(seen_${file} 1)
    list(APPEND found "${file}")
    list(APPEND kernels ${kernels_${file}})
    list(APPEND files ${needs_${file}})
  endwhile()
  set(${out} "${found}" PARENT_SCOPE)
  set(${out}_kernels "${kernels}" PARENT_SCOPE)
endfunction()

# Notes which functions and tables of other files' use the file defines: defined_<name> has the file.
macro(note_definitions file)
  # A definition begins at the start of a line. Static names belong to one file.
  file(READ "${SOURCE}/${file}" text)
  string(REPLACE "[" "(" text "${text}") # CMake's lists treat [ in a special way
  string(REGEX MATCHALL "\n[a-zA-Z][^\n(=;]*td_[a-z0-9_]+( =|\\()" lines "\n${text}")
  foreach(line IN LISTS lines)
    if(NOT line MATCHES "^\n(static|typedef|return) ")
      string(REGEX REPLACE ".*(td_[a-z0-9_]+)( =|\\()$" "\\1" name "${line}")
      list(APPEND defined_${name} "${file}")
    endif()
  endforeach()
endmacro()

set(CUDA_FILE "/cuda[^/]*(/|\\.[ch]$)")
set(all "")
foreach(module IN LISTS MODULES)
  set(folder "${SOURCE}/impl/${module}")
  file(GLOB_RECURSE files_${module} RELATIVE "${SOURCE}" "${folder}/*.c" "${folder}/*.cpp" "${folder}/*.cu" "${folder}/*.h" "${folder}/*.in")
  list(APPEND all ${files_${module}})
  foreach(file IN LISTS files_${module})
    get_filename_component(name "${file}" NAME_WE)
    if(file MATCHES "/templates/")
      list(APPEND defined_td_${module}_template_${name} "${file}")
    elseif(NOT file MATCHES "\\.h$")
      note_definitions("${file}")
    endif()
  endforeach()
endforeach()
file(GLOB launchers RELATIVE "${SOURCE}" "${SOURCE}/kernels/*.cu")
foreach(file IN LISTS launchers)
  note_definitions("${file}")
endforeach()
foreach(file IN LISTS all)
  read_needs("${file}")
endforeach()

set(TD_MODULES "")
set(TD_MODULE_COUNT 0)
set(ids "")
foreach(module IN LISTS MODULES)
  closure_of("${files_${module}}" FALSE files)
  hash_of("${COMPILER}\n${MARCH} ${FLAGS}" "cmake/TandemTargets.cmake;${files}" cpu)
  set(cuda "")
  if(CUDA)
    closure_of("${files_${module}}" TRUE files)
    kernel_files("${files_kernels}" kernels)
    hash_of("${cpu}\n${CUDA}\n${ARCHITECTURES}" "${files};${kernels}" cuda)
  endif()
  string(APPEND TD_MODULES "    {\"${module}\", \"${cpu}\", \"${cuda}\"},\n")
  string(APPEND ids "${module} ${cpu} ${cuda}\n")
  math(EXPR TD_MODULE_COUNT "${TD_MODULE_COUNT} + 1")
endforeach()
string(SHA256 TD_ID "${ids}")
string(SUBSTRING "${TD_ID}" 0 16 TD_ID)

file(GLOB headers "${SOURCE}/impl/*/*.h")
set(interface "")
set(includes "")
foreach(header IN LISTS headers)
  file(READ "${header}" text)
  if(text MATCHES "\nTD_BEGIN_DECLS")
    string(APPEND interface "${text}")
    string(APPEND includes "#include \"${header}\"\n")
  endif()
endforeach()
string(REGEX REPLACE "/\\*[^*]*\\*+([^/*][^*]*\\*+)*/|[ \t\r\n]" "" interface "${interface}")
string(SHA256 TD_INTERFACE "${interface}")
string(SUBSTRING "${TD_INTERFACE}" 0 16 TD_INTERFACE)
get_filename_component(folder "${OUT}" DIRECTORY)
set(cdef "${folder}/libtandem.cdef")
set(written "")
if(EXISTS "${cdef}")
  file(STRINGS "${cdef}" written LIMIT_COUNT 1)
endif()
if(CC AND NOT written STREQUAL "/* interface ${TD_INTERFACE} */")
  file(WRITE "${cdef}.in" "${includes}")
  execute_process(COMMAND "${CC}" -E -P -DTD_CFFI "-I${SOURCE}/impl" -x c "${cdef}.in"
                  OUTPUT_VARIABLE text RESULT_VARIABLE failed)
  if(failed)
    message(FATAL_ERROR "${CC} could not preprocess the public headers")
  endif()
  string(REPLACE "extern const " "extern " text "${text}") # cffi takes a const object for an integer constant
  file(WRITE "${cdef}" "/* interface ${TD_INTERFACE} */\n${text}")
endif()

# If the source tree is no checkout, the commit is unknown. A repository around the source tree belongs to
# another project.
set(TD_COMMIT unknown)
set(TD_DIRTY false)
find_program(GIT git)
if(GIT AND EXISTS "${SOURCE}/.git")
  execute_process(COMMAND "${GIT}" -C "${SOURCE}" rev-parse --short=10 HEAD
                  OUTPUT_VARIABLE commit OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET RESULT_VARIABLE failed)
  if(NOT failed)
    set(TD_COMMIT "${commit}")
    execute_process(COMMAND "${GIT}" --no-optional-locks -C "${SOURCE}" status --porcelain -- impl kernels cmake CMakeLists.txt
                    OUTPUT_VARIABLE changes ERROR_QUIET)
    if(changes)
      set(TD_DIRTY true)
    endif()
  endif()
endif()

# Flags may contain quotes, and the template puts quotes around them.
string(REPLACE "\\" "\\\\" FLAGS "${FLAGS}")
string(REPLACE "\"" "\\\"" FLAGS "${FLAGS}")
configure_file("${TEMPLATE}" "${OUT}" @ONLY)
