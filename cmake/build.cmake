# cmake -P: writes OUT, what td_build_info() answers, from TEMPLATE (impl/base/build.c.in), and leaves it
# alone where nothing changed. Run by every build: what it was configured with may be older than the source.
#   SOURCE    the source tree           MODULES   those of impl/, from the ground up, without td_
#   VERSION COMPILER MARCH FLAGS CUDA ARCHITECTURES BACKENDS   of the build; all but the first and last count
#   in the ids
#
# The id of a module is a hash of its files, of the modules whose headers they include, of theirs in turn, and
# of how they are compiled. Files for CUDA (cuda.c, cuda.h, cuda/) and the kernels that they include count in
# a second id, so that a kernel's change leaves results of the CPU as they are.

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

# A hash of files by their paths in the source tree and their contents, behind some words.
function(hash_of words files out)
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

# kernels/<name>.h stands for all of kernels/<name>.* and kernels/<name>_*, for what these include, and for
# the tiles.
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

set(TD_MODULES "")
set(TD_MODULE_COUNT 0)
set(ids "")
foreach(module IN LISTS MODULES)
  set(cpu_files_${module} "cmake/TandemTargets.cmake")
  set(cuda_files_${module} "")
  set(kernels "")
  set(folder "${SOURCE}/impl/${module}")
  file(GLOB_RECURSE files RELATIVE "${SOURCE}" "${folder}/*.c" "${folder}/*.cpp" "${folder}/*.h" "${folder}/*.in")
  foreach(file IN LISTS files)
    includes_of("${SOURCE}/${file}" headers)
    set(kind cpu)
    if(file MATCHES "/cuda(/|\\.[ch]$)")
      set(kind cuda)
      list(APPEND kernels ${headers})
    endif()
    list(APPEND ${kind}_files_${module} "${file}")
    foreach(header IN LISTS headers)
      string(REGEX REPLACE "/.*" "" used "${header}")
      if(NOT used STREQUAL module AND DEFINED cpu_files_${used})
        list(APPEND ${kind}_files_${module} ${cpu_files_${used}})
        list(APPEND cuda_files_${module} ${cuda_files_${used}})
      endif()
    endforeach()
  endforeach()
  kernel_files("${kernels}" files)
  list(APPEND cuda_files_${module} ${files})
  hash_of("${COMPILER}\n${MARCH} ${FLAGS}" "${cpu_files_${module}}" cpu)
  set(cuda "")
  if(CUDA)
    hash_of("${cpu}\n${CUDA}\n${ARCHITECTURES}" "${cuda_files_${module}}" cuda)
  endif()
  string(APPEND TD_MODULES "    {\"${module}\", \"${cpu}\", \"${cuda}\"},\n")
  string(APPEND ids "${module} ${cpu} ${cuda}\n")
  math(EXPR TD_MODULE_COUNT "${TD_MODULE_COUNT} + 1")
endforeach()
string(SHA256 TD_ID "${ids}")
string(SUBSTRING "${TD_ID}" 0 16 TD_ID)

# Outside a checkout of its own the commit is unknown: that of a repository around the source is not the
# source's.
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

# Flags may hold quotes; the template puts them between its own.
string(REPLACE "\\" "\\\\" FLAGS "${FLAGS}")
string(REPLACE "\"" "\\\"" FLAGS "${FLAGS}")
configure_file("${TEMPLATE}" "${OUT}" @ONLY)
